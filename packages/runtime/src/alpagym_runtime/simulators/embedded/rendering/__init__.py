"""Pictures of the embedded world, on the CPU: ray tables, ground tiles, textured quads. `renderer.Renderer` draws."""
