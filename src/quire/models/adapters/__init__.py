"""LoRA adapters: the files of PEFT read and checked, and their weights in the model."""
