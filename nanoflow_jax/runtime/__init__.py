"""The host side: requests, pages, batches, the step loop, its thread, and offline generation. Importing it imports nothing."""
