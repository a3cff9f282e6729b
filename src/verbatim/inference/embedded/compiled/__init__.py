"""Forward passes by one compiled function, for models and machines that it fits."""
