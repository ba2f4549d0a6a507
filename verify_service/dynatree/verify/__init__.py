"""The verify service: runs the target model over token trees and commits the path that the target chooses."""
