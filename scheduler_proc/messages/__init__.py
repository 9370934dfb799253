"""What arrives from front ends and workers is checked, and what goes to front ends is collected."""
