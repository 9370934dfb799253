"""What a step would cost on a machine that is not here."""
