"""`overcoat eval`: trained models measured on text and on tasks, side by side."""
