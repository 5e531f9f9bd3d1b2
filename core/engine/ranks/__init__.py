"""Several ranks from the driver's side: workers, their messages, what ranks exchange in a step."""
