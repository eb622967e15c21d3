"""Analyses by name. Adding one is adding its module, its line in the package's summaries, and its entry here."""

from __future__ import annotations

from collections.abc import Mapping

from flcore.evaluation.analyses import SUMMARIES
from flcore.evaluation.analyses.base import Analysis, always, keeps_trained_models, needs_global_model
from flcore.evaluation.analyses.class_heatmap import class_heatmap, class_heatmap_trained
from flcore.evaluation.analyses.generated import generator_distances, has_generated_features, tsne_generated
from flcore.evaluation.analyses.gradcam import can_compare_maps, gradcam_cases
from flcore.evaluation.analyses.inversion import inversion, inversion_search
from flcore.evaluation.analyses.tsne import (
    has_projections,
    keeps_uncalibrated,
    tsne,
    tsne_calibration,
    tsne_projections,
    tsne_trained,
)
from flcore.evaluation.analyses.tsne_prototypes import tsne_prototypes
from flcore.evaluation.analyses.virtual_sheet import has_virtual_images, virtual_sheet

ANALYSES: Mapping[str, Analysis] = {
    name: Analysis(SUMMARIES[name], compute, applies)
    for name, compute, applies in (
        ("class_heatmap", class_heatmap, always),
        ("class_heatmap_trained", class_heatmap_trained, keeps_trained_models),
        ("tsne", tsne, always),
        ("tsne_trained", tsne_trained, keeps_trained_models),
        ("tsne_projections", tsne_projections, has_projections),
        ("tsne_calibration", tsne_calibration, keeps_uncalibrated),
        ("tsne_prototypes", tsne_prototypes, always),
        ("tsne_generated", tsne_generated, has_generated_features),
        ("virtual_images", virtual_sheet, has_virtual_images),
        ("generator_distances", generator_distances, has_generated_features),
        ("inversion", inversion, needs_global_model),
        ("inversion_search", inversion_search, needs_global_model),
        ("gradcam", gradcam_cases, can_compare_maps),
    )
}
