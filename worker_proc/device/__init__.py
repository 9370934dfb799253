"""What a device can do, and transfers to and from it."""
