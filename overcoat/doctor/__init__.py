"""`overcoat doctor`: what this machine can train, and how fast."""
