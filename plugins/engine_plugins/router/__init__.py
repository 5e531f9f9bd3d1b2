"""Who answers an API request."""
