"""Text in and out of token ids: tokenizer, chat template, incremental decoding, stop strings."""
