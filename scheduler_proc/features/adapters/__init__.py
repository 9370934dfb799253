"""LoRA adapters: which are loaded, in which slot, and whose requests a step computes."""
