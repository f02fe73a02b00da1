"""The parts of tools/train_embedded_model.py: corpus, tokenizer, model, optimizer, files."""
