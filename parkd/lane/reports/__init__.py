"""What is told of turns and conversations: explanations, causes of what was read again, lists, lines of the log."""
