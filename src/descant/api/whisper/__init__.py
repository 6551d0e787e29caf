"""Speech: models that hear through a window, and audio of any length."""
