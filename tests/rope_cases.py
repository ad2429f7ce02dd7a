"""RoPE configurations and the positions at which their tables are compared with stored values."""

from tinyvllm_cli.config import RopeConfig

POSITIONS = (0, 1, 511, 8_193, 131_071)

# name: (configuration, head_dim)
ROPES = {
    "smollm2": (RopeConfig(theta=1e5), 64),
    "llama2": (RopeConfig(theta=1e4), 128),
    "llama3": (RopeConfig(theta=5e5), 128),
    "llama3_1": (RopeConfig(theta=5e5, type="llama3", factor=8.0), 128),
    "llama3_2": (RopeConfig(theta=5e5, type="llama3", factor=32.0), 64),
    "other_bands": (RopeConfig(theta=1e4, type="llama3", factor=6.0, low_freq_factor=2.0, high_freq_factor=9.0), 80),
    "linear": (RopeConfig(theta=1e4, type="linear", factor=3.0), 128),
}
