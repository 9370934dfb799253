"""LoRA adapters by the names that clients use: folders read once, and a table that all front ends share."""
