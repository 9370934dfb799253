"""Request bodies: fields, ranges and errors."""
