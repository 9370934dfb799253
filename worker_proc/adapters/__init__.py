"""LoRA adapters: host copies, slots, and the slots that the tokens of a step use."""
