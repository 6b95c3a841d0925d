"""Pages for a browser: what they show, and the browser."""
