"""Work of a model: counted on the meta device, or estimated from its parameters."""
