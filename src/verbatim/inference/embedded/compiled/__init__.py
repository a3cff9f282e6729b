"""Forward passes by one compiled function, for the models and machines that it fits."""
