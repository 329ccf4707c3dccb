"""The search: draw policies, drop those that cost accuracy, keep those that leak least, and confirm them by an audit."""
