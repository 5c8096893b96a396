"""The timeline: every slice of a rank's window, drawn from binary answers to what is in view."""
