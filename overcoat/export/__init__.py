"""`overcoat export`: a trained model for an inference engine."""
