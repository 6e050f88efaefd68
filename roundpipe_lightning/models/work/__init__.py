"""What a model costs: counted on the meta device, or estimated from its parameters."""
