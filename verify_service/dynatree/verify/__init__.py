"""The verify service: runs the target model over token trees and commits its own path."""
