{{- define "quotient.labels" -}}
app.kubernetes.io/name: quotient
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: quotient
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "quotient.selector" -}}
app.kubernetes.io/name: quotient
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The configuration as the components read it: the release's own values over the user's. */}}
{{- define "quotient.configuration" -}}
{{- if has .Release.Namespace (list "default" "kube-system" "kube-public" "kube-node-lease") -}}
{{- fail (printf "namespace %s: others work there; install Quotient into one of its own, as quotient-system" .Release.Namespace) -}}
{{- end -}}
{{- if hasKey .Values.config "systemNamespace" -}}
{{- fail "config.systemNamespace: it is the release's own; name it with helm install --namespace" -}}
{{- end -}}
{{- if dig "certificates" "manage" "" .Values.config | toString -}}
{{- fail "config.certificates.manage: say who makes certificates in certificates.mode" -}}
{{- end -}}
{{- $own := dict "apiVersion" "quotient.dev/v1" "kind" "Configuration" "systemNamespace" .Release.Namespace -}}
{{- $managed := dict "certificates" (dict "manage" (eq .Values.certificates.mode "self")) -}}
{{- toYaml (mergeOverwrite (dict) $managed .Values.config $own) -}}
{{- end }}

{{- define "quotient.domain" -}}
{{ dig "domain" "inspur.com" .Values.config }}
{{- end }}

{{- define "quotient.hami" -}}
{{ if dig "vocabularies" "hami" false .Values.config }}yes{{ end }}
{{- end }}

{{- define "quotient.nvidiaGpu" -}}
{{ if or (dig "vocabularies" "nvidiaGpu" false .Values.config) (dig "vocabularies" "hami" false .Values.config) }}yes{{ end }}
{{- end }}

{{/* A configuration that is armed stays so in an upgrade; a new one is armed by the controller when there is an answer. */}}
{{- define "quotient.failurePolicy" -}}
{{- $live := lookup "admissionregistration.k8s.io/v1" .kind "" "quotient" -}}
{{- if and $live $live.webhooks (eq .root.Values.webhook.arm "auto") -}}
{{- (index $live.webhooks 0).failurePolicy | default "Ignore" -}}
{{- else -}}
Ignore
{{- end -}}
{{- end }}

{{- define "quotient.registrationAnnotations" -}}
{{- $live := lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "quotient" }}
{{- /* The emergency exit stays open in an upgrade, until `quotient arm`. */}}
quotient.dev/arm: {{ if eq (dig "metadata" "annotations" "quotient.dev/arm" "" ($live | default dict)) "never" }}never{{ else }}{{ .Values.webhook.arm }}{{ end }}
{{- if eq .Values.certificates.mode "cert-manager" }}
cert-manager.io/inject-ca-from: {{ .Release.Namespace }}/quotient-webhook
{{- end }}
{{- end }}

{{- define "quotient.tlsSecret" -}}
{{- if eq .Values.certificates.mode "provided" -}}
{{- required "certificates.mode is provided: name the secret in certificates.secretName" .Values.certificates.secretName -}}
{{- else -}}
quotient-webhook-tls
{{- end -}}
{{- end }}

{{- define "quotient.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
{{- .Values.priorityClass.name | default "quotient-critical" -}}
{{- else -}}
{{- .Values.priorityClass.name -}}
{{- end -}}
{{- end }}

{{- define "quotient.image" -}}
{{ required "image is empty: build one (README, Install) and name it with --set image=REGISTRY/quotient:TAG" .Values.image }}
{{- end }}

{{- define "quotient.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "quotient.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "quotient.env" -}}
- {name: QUOTIENT_CONFIG, value: /etc/quotient/configuration.yaml}
- {name: QUOTIENT_LOG_FORMAT, value: json}
{{- with .Values.kubernetesService.host }}
- {name: KUBERNETES_SERVICE_HOST, value: {{ . | quote }}}
{{- end }}
{{- with .Values.kubernetesService.port }}
- {name: KUBERNETES_SERVICE_PORT, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "quotient.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: ops}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: ops}
  periodSeconds: 10
  failureThreshold: 6
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: ops}
  periodSeconds: 2
  failureThreshold: 2
  timeoutSeconds: 5
{{- end }}

{{- define "quotient.caBundle" -}}
{{- if eq .Values.certificates.mode "provided" -}}
caBundle: {{ required "certificates.mode is provided: give its CA as PEM in certificates.caBundle" .Values.certificates.caBundle | b64enc }}
{{- end -}}
{{- end }}
