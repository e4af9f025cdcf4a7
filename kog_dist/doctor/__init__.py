"""`kog-doctor`: can an engine start here, and what would slow it down? One module per area; imports the standard library only."""
