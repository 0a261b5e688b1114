"""The engine on MLX."""
