"""Weight files: safetensors and GGUF behind one interface, de-quantized, named and laid out as the ops want them."""
