"""Pictures and pages: plots of traces, of simulations and of the papers' claims, from saved data only."""
