"""`overcoat eval`: measure trained models on text and on tasks, side by side."""
