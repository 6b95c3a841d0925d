"""Makes a timeline of a graph and the time that each of its operators takes."""
