"""What the scheduler consumed and produced, kept so that a run can be replayed decision by decision."""
