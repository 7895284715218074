"""Programs that this project is compared with and that cannot share its environment: they meet it in files alone."""
