"""Client side of the mount commands: create, find, query and end mounts, and display the replies."""
