"""Forward passes in a compiled C function, for the models and machines that this function supports."""
