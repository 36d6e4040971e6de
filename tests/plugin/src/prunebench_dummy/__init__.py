"""A plug-in of one method."""
