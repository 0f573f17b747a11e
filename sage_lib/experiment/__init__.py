"""What a run is asked to do, where it keeps things, and what made it."""
