"""The draft side's view of the target model, and its sessions on verify services."""
