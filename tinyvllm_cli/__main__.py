"""`python -m tinyvllm_cli` is the command `tinyvllm`."""

from tinyvllm_cli.cli import main

main()
