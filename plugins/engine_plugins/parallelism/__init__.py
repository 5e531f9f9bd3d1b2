"""How weights and work are split over devices."""
