"""`overcoat init`: a configuration to begin with."""
