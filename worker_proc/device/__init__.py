"""Properties of the device, and transfers to it."""
