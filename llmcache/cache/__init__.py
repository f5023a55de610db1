"""Pure cache science: visiting orders, cursors and the arbitration of a budget. No I/O, no threads."""
