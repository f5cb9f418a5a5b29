"""The small driving policy that the default run trains."""
