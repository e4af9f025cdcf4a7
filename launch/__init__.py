"""How an engine is started, watched and stopped."""
