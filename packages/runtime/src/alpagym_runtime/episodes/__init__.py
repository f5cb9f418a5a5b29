"""Episodes that last: their file format, stores of them, views and exports."""
