"""The cost model of parallelism: fitted to published figures, and tables of what it estimates."""
