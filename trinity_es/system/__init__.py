"""Starting, finding, watching and ending the processes of a store's actor system."""
