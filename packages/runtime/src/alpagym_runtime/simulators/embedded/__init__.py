"""The world that runs in the process: scenes, state kernel, expert, readers."""
