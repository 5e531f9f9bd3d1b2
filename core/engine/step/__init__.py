"""One step on the device: its plan and result (plain data), the device tables, the runner, captured steps."""
